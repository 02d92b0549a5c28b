"""The largest values that policies' settings may have: what a run's messages and buffers hold."""

MAX_WIDTH = 16  # guesses after one token
MAX_RUN = 64  # guesses a run
MAX_DEPTH = 64  # guesses after each other
MAX_TREE = 1000  # guesses of one tree
MAX_RUNS = 1000  # runs in flight
