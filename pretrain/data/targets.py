"""How a target says that it carries no loss. By itself, so that looking at data needs no torch."""

IGNORED = -100
