"""A trained EAGLE-3 head: record what a target writes and computes, train, measure, write the GGUF."""
