"""Makes two reward models of a language model, to stand in for trained ones: `python reward_models.py MODEL FOLDER`.

They are FOLDER/yes and FOLDER/good. Nothing is trained: the body is the language model, and the head the difference of two rows of its
output matrix, so that the score of a reply is how much likelier the model finds one word than another as the next token after it: " Yes"
than " No", " good" than " bad". That says little about a reply's quality. It shows how reward models are loaded and used, with the weights
and the time that trained ones of that size take. One is saved as a sequence classifier, the other as a scalar head.
"""

import sys
from pathlib import Path
from typing import Any

import torch

STAND_INS = {"yes": ("SequenceClassification", " Yes", " No"), "good": ("TokenClassification", " good", " bad")}


def stand_in(model: Path, folder: Path, kind: str, better: str, worse: str) -> Path:
    """Writes a reward model of the language model in `model` to `folder`, with its tokenizer."""
    import transformers

    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(model)
    causal: Any = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    # Padding takes no part: a reply is read at its last token, whatever that is.
    config: Any = transformers.AutoConfig.from_pretrained(model, num_labels=1, pad_token_id=None)
    judge: Any = getattr(transformers, f"AutoModelFor{kind}").from_config(config, dtype=torch.bfloat16)
    judge.base_model.load_state_dict(causal.base_model.state_dict())
    rows = [tokenizer(word, add_special_tokens=False)["input_ids"][0] for word in (better, worse)]
    with torch.no_grad():
        output = causal.get_output_embeddings().weight
        judge.score.weight.copy_(output[rows[0]] - output[rows[1]])
        if judge.score.bias is not None:
            judge.score.bias.zero_()
    judge.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python reward_models.py MODEL FOLDER")
    for name, (kind, better, worse) in STAND_INS.items():
        print(stand_in(Path(sys.argv[1]), Path(sys.argv[2]) / name, kind, better, worse))
