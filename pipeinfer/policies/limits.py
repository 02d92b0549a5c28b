"""Upper limits of policies' settings, set by messages and buffers."""

MAX_WIDTH = 16  # guesses after one token

MAX_RUN = 128  # guesses a run

MAX_DEPTH = 64  # guesses after each other

MAX_TREE = 1000  # guesses of one tree

MAX_RUNS = 1000  # runs in flight
