"""The user's line in a stack trace, the same on every machine."""

from __future__ import annotations

import suite.measure.source_line
from optimizations.stack_trace import Frame
from suite.measure.source_line import line_of_frame, short_line, short_path


def test_lines_are_written_the_same_way_on_every_machine():
    path = "/home/x/venv/lib/python3.12/site-packages/transformers/models/gpt2/modeling_gpt2.py"
    frame = Frame(path, 573, "forward", "x = self.linear(ids)")
    line = "transformers/models/gpt2/modeling_gpt2.py:573 in forward: x = self.linear(ids)"
    assert line_of_frame(frame) == short_line(str(frame)) == line
    assert short_path("/a/c.py") == "c.py"
    assert short_path(suite.measure.source_line.__file__) == "suite/measure/source_line.py"
