"""Rank 1 imports treeattn from another folder than the others."""

import json
import os
import sys

from treeattn.launch import launched

if launched().rank == 1:
    for name in [name for name in sys.modules if name.partition(".")[0] == "treeattn"]:
        del sys.modules[name]
    sys.path.insert(0, sys.argv[1])

import treeattn

try:
    treeattn.TreeComm()
    said = ""
except treeattn.errors.CommError as error:
    said = str(error)
rank = launched().rank
os.write(1, (json.dumps({"rank": rank, "said": said, "file": treeattn.__file__}) + "\n").encode())
