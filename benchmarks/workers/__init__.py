"""Scripts that the benchmarks run as workers. They import next to nothing: the launchers are what is measured."""
