"""The user's line in a stack trace, the same on every machine."""

from __future__ import annotations

import traceback
from pathlib import Path

import suite.measure.source_line
from suite.measure.source_line import short_path, user_line

TRACE = """
  File "/home/x/venv/lib/python3.12/site-packages/transformers/models/gpt2/modeling_gpt2.py", line 573, in forward
    x = self.linear(ids)
  File "/home/x/venv/lib/python3.12/site-packages/torch/nn/modules/linear.py", line 125, in forward
    return F.linear(input, self.weight, self.bias)
"""


def test_the_innermost_line_outside_of_pytorch():
    assert user_line(TRACE) == "transformers/models/gpt2/modeling_gpt2.py:573 in forward: x = self.linear(ids)"


def test_a_trace_of_pytorch_alone_gives_its_innermost_line():
    inside = TRACE[TRACE.index("modeling_gpt2") :].split("\n", 2)[2]
    assert user_line(inside) == (
        "torch/nn/modules/linear.py:125 in forward: return F.linear(input, self.weight, self.bias)"
    )


def test_without_a_frame_there_is_no_line():
    assert user_line(None) is None
    assert user_line("Found nothing") is None


def test_frames_without_code_do_not_swallow_the_next_frame():
    trace = 'File "/a/b.py", line 1, in f\n  File "/a/c.py", line 2, in g'
    assert user_line(trace) == "c.py:2 in g"


def test_real_traces_of_this_project_are_relative_to_it():
    trace = "".join(traceback.format_stack())
    assert user_line(trace).startswith(f"tests/suite/measure/{Path(__file__).name}:")
    assert short_path(suite.measure.source_line.__file__) == "suite/measure/source_line.py"
