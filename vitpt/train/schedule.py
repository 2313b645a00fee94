"""The learning rate as a pure function of the step."""

import math

from vitpt.recipe.schema import Schedule


def learning_rate(schedule: Schedule, base: float, steps: int, done: int) -> float:
    """Learning rate of the next update.

    Args:
        schedule: shape, warmup and end of the schedule.
        base: peak learning rate.
        steps: updates of the whole run (T).
        done: updates already done (n); update number t = 1..T uses n = t - 1.

    Source: big_vision utils.py (cosine, linear); the end of the decay is absolute.
    """
    warmup = schedule.warmup_steps
    warm = min(1.0, done / warmup) if warmup else 1.0
    progress = min(max((done - warmup) / max(steps - warmup, 1), 0.0), 1.0)
    left = (1 + math.cos(math.pi * progress)) / 2 if schedule.kind == "cosine" else 1 - progress
    return (schedule.end_lr + (base - schedule.end_lr) * left) * warm


def total_steps(epochs: float, samples: int, global_batch_size: int) -> int:
    """Steps of a number of epochs: rounded, at least one.

    Source: big_vision utils.py, `steps`.
    """
    return max(round(epochs * samples / global_batch_size), 1)
