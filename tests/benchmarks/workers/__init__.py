"""Scripts that the benchmarks run as workers. They import next to nothing, so that the launchers are what is measured."""
