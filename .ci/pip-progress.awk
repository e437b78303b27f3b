# pip's output as one short line per package; what it complains about goes through as it is.
function step(what) { printf "  [%3d/%d] %s\n", ++n, total, what; fflush() }
/^Collecting /                     { step($2); next }
/^Processing /                     { parts = split($2, path, "/"); step(path[parts]); next }
/^Requirement already satisfied: / { ++n; next }
/^Installing collected packages/   { print "  unpacking"; fflush(); next }
/ERROR|rror:/                      { print; fflush() }
