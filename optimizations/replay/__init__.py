"""The steady call: what happens between the generated code and the launch."""
