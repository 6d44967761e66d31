from enum import Enum

class RequestOutputKind(Enum):
    FINAL_ONLY = ...
