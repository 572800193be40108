"""``python -m kvxfer``: the same as the command ``kvxfer``, also where nothing is installed."""

from kvxfer.cli.app import main

if __name__ == "__main__":
    main()
