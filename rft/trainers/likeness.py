"""Whether two models read the same tokens, and whether they are of one architecture: what stands in the way, in words."""

from rft.models import ModelFolder
from rft.trainers import hugging_face

SHOWN = 3


def differences(here: ModelFolder, there: ModelFolder) -> list[str]:
    """What keeps `here` from standing in for `there`: its class, the shapes of its tensors, its vocabulary. Nothing if it can."""
    kinds = [type(folder.config).__name__.removesuffix("Config") for folder in (here, there)]
    if kinds[0] != kinds[1]:
        return [f"it is a {kinds[0]}, and the other a {kinds[1]}"]
    shapes = [{n: tuple(t.shape) for n, t in hugging_face.named_tensors(_empty(folder)).items()} for folder in (here, there)]
    return [*_unlike(*shapes), *other_tokens(here, there)]


def other_tokens(here: ModelFolder, there: ModelFolder) -> list[str]:
    """What keeps `here` from reading the tokens of `there`: those that it lacks, or numbers otherwise. It may have more."""
    ours, theirs = (folder.tokenizer.get_vocab() for folder in (here, there))
    apart = [token for token, number in theirs.items() if ours.get(token) != number]
    shown = ", ".join(f"{token!r} is {ours.get(token, 'missing')} and {theirs[token]}" for token in sorted(apart)[:SHOWN])
    return [f"its tokenizer has another number for {len(apart)} of the other's {len(theirs)} tokens, such as: {shown}"] if apart else []


def other_ends(here: ModelFolder, there: ModelFolder) -> list[str]:
    """What tells apart the tokens that texts begin and end with. Nothing if they are the same."""
    pairs = [(name, getattr(here.tokenizer, name), getattr(there.tokenizer, name)) for name in ("bos_token", "eos_token")]
    return [f"its {name} is {ours!r}, and the other's {theirs!r}" for name, ours, theirs in pairs if ours != theirs]


def _empty(folder: ModelFolder) -> object:
    return hugging_face.empty(folder, checkpointing=False)


def _unlike(ours: dict[str, tuple[int, ...]], theirs: dict[str, tuple[int, ...]]) -> list[str]:
    apart = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    shown = ", ".join(f"{name} is {ours.get(name, 'missing')} and {theirs.get(name, 'missing')}" for name in apart[:SHOWN])
    return [f"{len(apart)} of its tensors differ from the other's, such as: {shown}"] if apart else []
