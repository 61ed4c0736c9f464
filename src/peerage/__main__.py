"""`python -m peerage`: the command line, where no script is at hand."""

from peerage.cli.app import main

if __name__ == "__main__":
    main()
