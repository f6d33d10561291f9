// The part of solc's command line that forge uses: --version and --standard-json.
// Paths (--allow-paths, --base-path, --include-path) are of no use: forge sends every source inline.
"use strict";

const path = require("path");
const fs = require("fs");

const solc = require(path.join(__dirname, "..", "node_modules", "solc"));
const args = process.argv.slice(2);

if (args.includes("--version")) {
  // npm's build calls itself …Emscripten.clang; forge parses the native form.
  const version = solc.version().replace(/\.Emscripten.*$/, ".Linux.g++");
  process.stdout.write(
    "solc, the solidity compiler commandline interface\nVersion: " + version + "\n",
  );
} else if (args.includes("--standard-json")) {
  process.stdout.write(solc.compile(fs.readFileSync(0, "utf8")));
} else {
  process.stderr.write("solc-shim: only --version and --standard-json are understood\n");
  process.exitCode = 2;
}
