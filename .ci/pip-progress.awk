# pip's output as one short line per package; what it complains about goes through as it is.
/^Collecting /                     { printf "  [%3d/%d] %s\n", ++n, total, $2; fflush(); next }
/^Requirement already satisfied: / { ++n; next }
/^Installing collected packages/   { print "  unpacking"; fflush(); next }
/ERROR|rror:/                      { print; fflush() }
