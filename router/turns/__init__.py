"""What the text of an assistant's turn means: reasoning, tool calls, structured outputs."""
