"""`python -m vitpt`, for launchers that start a module: `torchrun -m vitpt ...`, `accelerate launch -m vitpt ...`."""

from vitpt.cli.app import main

if __name__ == "__main__":
    main()
