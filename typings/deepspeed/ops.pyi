__compatible_ops__: dict[str, bool]
