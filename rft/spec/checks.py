"""Checks that the specifications share."""

from collections.abc import Iterator, Mapping
from typing import Any

from rft.errors import BadInput


def at_least_one(spec: object, *names: str) -> None:
    """Raises `BadInput` for a field of `spec` that is below 1."""
    for name in names:
        if getattr(spec, name) < 1:
            raise BadInput(f"{type(spec).__name__}.{name} must be at least 1, got {getattr(spec, name)}")


def check_heads(config: Any, tensor_parallel: int) -> int:
    """The heads of keys and values. Raises `BadInput` where TP does not divide the model's heads, or can neither share nor repeat those."""
    heads = int(config.num_attention_heads)
    shared = int(getattr(config, "num_key_value_heads", None) or heads)
    if heads % tensor_parallel:
        raise BadInput(f"tensor_parallel={tensor_parallel} does not divide the model's {heads} attention heads")
    if shared % tensor_parallel and tensor_parallel % shared:
        both = f"tensor_parallel={tensor_parallel} and the model's {shared} heads of keys and values"
        raise BadInput(f"{both}: one must be a multiple of the other")
    return shared


def check_positions(spec: Any, config: Any) -> None:
    """Raises `BadInput` for an engine's `max_model_len` beyond the rows that a model's configuration allows, by scaled RoPE too."""
    longest = positions(config)
    if longest is not None and spec.max_model_len > longest:
        raise BadInput(
            f"max_model_len={spec.max_model_len} is more than the {longest} tokens that the model's configuration allows "
            f"(max_position_embeddings={config.max_position_embeddings}, and its RoPE scaling, if any); "
            f"set {type(spec).__name__}(max_model_len={longest})"
        )


def positions(config: Any) -> int | None:
    """Tokens of the longest row that a configuration allows; None where it does not say.

    `linear` and `dynamic` scaling stretch `max_position_embeddings`, `yarn` its own original length; where other kinds do, it is the
    length after that.
    """
    longest: int | None = getattr(config, "max_position_embeddings", None)
    if longest is None:
        return None
    stretched: list[float] = [longest]
    for rope in _ropes(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}):
        kind, factor = rope.get("rope_type", rope.get("type")), rope.get("factor") or 1.0
        if kind in ("linear", "dynamic") and "gemma3" not in config.model_type:  # whose configuration says what is after it
            stretched.append(factor * longest)
        elif kind == "yarn":
            stretched.append(factor * (rope.get("original_max_position_embeddings") or longest))
    return int(max(stretched))


def _ropes(given: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Of all layers, or of each kind of layer."""
    if all(isinstance(each, Mapping) for each in given.values()):
        yield from given.values()
    else:
        yield given
