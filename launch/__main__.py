"""`python -m ep_runtime.launch`: the command line, and what each rank that `run` starts runs."""

import os
import signal

if __name__ == "__main__":
    if "EP_RUNTIME_STARTED" in os.environ:
        # Ctrl-C reaches every process of the terminal: ranks end at once, their starter reports.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from ep_runtime.launch.cli import main

    main()
