import json
import re
from collections import Counter
from pathlib import Path

words = re.findall("[a-z]+", Path("/app/poem.txt").read_text().lower())
Path("/app/counts.json").write_text(json.dumps(Counter(words)))
