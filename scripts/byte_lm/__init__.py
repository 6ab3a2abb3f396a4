"""What `scripts/train` runs: a byte-level language model, trained per recipe on the same bytes."""
