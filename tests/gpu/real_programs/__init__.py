"""Programs as people write them around `torch.compile`, one family per module, and what runs and judges them.

`tests/gpu/programs.py` is the command. A program does not depend on the mode: it compiles by its `Setting`, and does
the rest as its users would (no `clone`, no `mark_step_begin`).
"""
