"""Draw a record of `ep-runtime bench`, where the machine that made it has no matplotlib.

python benchmarks/plot_record.py benchmarks/results/NAME.json benchmarks/results/NAME.png
"""

import sys
from pathlib import Path

from ep_runtime.launch.bench_job import read_record
from ep_runtime.launch.bench_plot import prepare_plot_file, write_plot

if __name__ == "__main__":
    record_file, plot_file = map(Path, sys.argv[1:])
    prepare_plot_file(plot_file)
    write_plot(read_record(record_file), plot_file)
