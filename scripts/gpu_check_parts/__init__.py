"""What `scripts/gpu_check` runs: tests and benchmarks that need a GPU, each in a process with a time limit."""
