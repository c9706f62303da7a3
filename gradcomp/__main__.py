"""``python -m gradcomp``, and ``torchrun ... -m gradcomp``."""

from gradcomp.cli.main import main

if __name__ == "__main__":
    main()
