#!/bin/sh
# A worker that is no Python program.
#
#   elastic-run --standalone --nproc-per-node=2 --no-python examples/program.sh '${local_rank}'
#
# ${local_rank} in an argument becomes the worker's number; quote it, so that your shell leaves it alone.
echo "worker $RANK of $WORLD_SIZE, local rank $1, meets the others at $MASTER_ADDR"
