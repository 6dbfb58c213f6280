"""A training script whose entry point is under our @record."""

from elastic_run.multiprocessing.errors import record
from tests.parity.programs.observation import observe_and_end


@record
def main() -> None:
    """Observe and end."""
    observe_and_end()


if __name__ == "__main__":
    main()
