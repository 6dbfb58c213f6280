"""A module for -m."""

from tests.parity.programs.observation import observe_and_end

if __name__ == "__main__":
    observe_and_end()
