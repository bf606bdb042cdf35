"""`python -m qkablate`, and `torchrun -m qkablate`: the same as the command."""

from qkablate.cli import main

if __name__ == "__main__":
    main()
