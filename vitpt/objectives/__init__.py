"""What a backbone is trained for, in plain torch: one module an objective."""

from vitpt.objectives.loss import Loss
from vitpt.objectives.task import OBJECTIVES, Task, build_task

__all__ = ["OBJECTIVES", "Loss", "Task", "build_task"]
