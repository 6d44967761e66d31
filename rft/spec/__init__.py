"""What `launch` is given: typed, frozen, and the source of the command line. What cannot work is refused here, with the reason."""

from rft.spec.engines import DType, EngineSpec, SGLangEngine, TransformersEngine, VLLMEngine
from rft.spec.launch import LaunchSpec
from rft.spec.lora import LoRA
from rft.spec.roles import Critic, FrozenSpec, MovingAverage, Reference, RewardModel, SharedCritic, Where
from rft.spec.training import CriticTrainerSpec, DeepSpeedTrainer, FSDP2Trainer, TrainerSpec, Training

__all__ = [
    "Critic",
    "CriticTrainerSpec",
    "DType",
    "DeepSpeedTrainer",
    "EngineSpec",
    "FSDP2Trainer",
    "FrozenSpec",
    "LaunchSpec",
    "LoRA",
    "MovingAverage",
    "Reference",
    "RewardModel",
    "SGLangEngine",
    "SharedCritic",
    "TrainerSpec",
    "Training",
    "TransformersEngine",
    "VLLMEngine",
    "Where",
]
