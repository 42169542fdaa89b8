"""`python -m relax_llm_passes` is the command line."""

from .cli import main

if __name__ == "__main__":
    raise SystemExit(main())
