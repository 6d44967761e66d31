class OutputProcessor:
    request_states: dict[str, object]
