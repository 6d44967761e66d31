"""What every engine asks of a request before it computes anything, and which tokens end a response."""

from collections.abc import Sequence

from rft.engines.protocol import Request
from rft.errors import BadInput
from rft.images import Placeholder, misfit
from rft.models import ModelFolder
from rft.sampling import Sampling


def check_requests(
    requests: Sequence[Request], sampling: Sampling, *, max_model_len: int, vocab: int, placeholder: Placeholder | None = None
) -> None:
    """Raises `BadInput` that names the first request that cannot be served; nothing has been computed then.

    `placeholder` is that of the engine's model; None: it takes no images.
    """
    for index, request in enumerate(requests):
        check_tokens(request.tokens, f"request {index}", vocab)
        if request.images is not None and placeholder is None:
            raise BadInput(f"request {index} has images, and this engine's model takes none")
        if request.images is not None and placeholder and (wrong := misfit(list(request.tokens), request.images, placeholder)):
            raise BadInput(f"request {index}: {wrong}")
        longest = len(request.tokens) + sampling.max_new_tokens
        if longest > max_model_len:
            raise BadInput(
                f"request {index} has {len(request.tokens)} prompt tokens, and {sampling.max_new_tokens} new ones may follow: "
                f"more than max_model_len={max_model_len}; shorten the prompt, or raise the engine's max_model_len"
            )
    if max(sampling.stop_tokens, default=0) >= vocab:
        raise BadInput(f"stop_tokens={sampling.stop_tokens} has a token outside of the model's vocabulary of {vocab}")


def check_sequences(sequences: Sequence[tuple[int, ...]], *, max_model_len: int, vocab: int) -> None:
    """The same for sequences that are only scored."""
    for index, tokens in enumerate(sequences):
        check_tokens(tokens, f"sequence {index}", vocab)
        if len(tokens) > max_model_len:
            raise BadInput(f"sequence {index} has {len(tokens)} tokens, more than max_model_len={max_model_len}")


def check_tokens(tokens: Sequence[int], what: str, vocab: int) -> None:
    """Raises `BadInput` for no tokens, or for one that the model has no embedding of."""
    if not tokens:
        raise BadInput(f"{what} is empty: an engine continues at least one token")
    if min(tokens) < 0 or max(tokens) >= vocab:
        raise BadInput(
            f"{what} has a token outside of the model's vocabulary of {vocab}: its tokens go from {min(tokens)} to {max(tokens)}"
        )


def end_tokens(model: ModelFolder) -> tuple[int, ...]:
    """Ids that end a response: those of the generation configuration (else of the model's), and the tokenizer's own."""
    from transformers import GenerationConfig

    if (model.path / "generation_config.json").is_file():
        named = GenerationConfig.from_pretrained(model.path).eos_token_id
    else:
        named = getattr(model.config, "eos_token_id", None)
    listed = named if isinstance(named, list) else [named]
    ids = (*listed, getattr(model.tokenizer, "eos_token_id", None))
    return tuple(sorted({int(end) for end in ids if end is not None}))
