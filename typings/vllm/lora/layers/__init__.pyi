from torch.nn import Module

class BaseLayerWithLoRA(Module):
    base_layer: Module
