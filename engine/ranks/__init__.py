"""One model computed by several processes of a machine: each rank has a part of every layer, and of each block."""
