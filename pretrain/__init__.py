"""pretrain: language-model pretraining whose parallelism is one line of configuration.

Importing this package is light: torch and everything heavier are imported by the parts that use them.
"""

__version__ = "0.1.0"
