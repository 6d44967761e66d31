"""Checkpoints on disk: which are whole, the user's tree as plain data, tensors in shards, random states. Nothing here knows a runtime.

folder/checkpoint-000007-version-12/
    manifest.json            sizes and checksums of all other files; the last one to be written
    facts.json               of what run, and of which tensors, it is
    run.json, run.safetensors    the user's tree
    random/00000.json …      random states, one file a rank
    tensors/….safetensors    what models and optimizers go on from, one part a rank
"""
