"""What a trained model is worth: perplexity and bits per byte of texts, and tasks of lm-evaluation-harness."""
