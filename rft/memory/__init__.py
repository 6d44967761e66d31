"""What a job takes of each device's memory, phase by phase: planned from configurations, before anything is put there.

Pure functions of specifications and a model's configuration; no device and no process group is touched.
"""

from rft.memory.plan import Phase, Plan, plan
from rft.memory.setting import Schedule, Setting

__all__ = ["Phase", "Plan", "Schedule", "Setting", "plan"]
