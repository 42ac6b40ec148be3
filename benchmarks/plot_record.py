"""Draw a record of `ep-runtime bench`, where the machine that made it has no matplotlib.

python benchmarks/plot_record.py benchmarks/results/NAME.json benchmarks/results/NAME.png
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # a script's own folder is there, not the root

from benchmarks.record_file import BENCH, draw_command
from ep_runtime.launch.bench_plot import write_plot

if __name__ == "__main__":
    sys.exit(draw_command(sys.argv[1:], BENCH, write_plot))
