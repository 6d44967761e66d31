import enum

class PlatformEnum(enum.Enum):
    OOT = ...
