"""Programs as people write them around `torch.compile`, one family per module, and what runs and judges them.

`tests/gpu/programs.py` is the command. A program knows nothing of modes: it asks its `Setting` to compile, and does the
rest as its users would (no `clone`, no `mark_step_begin`).
"""
