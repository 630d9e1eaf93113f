# sh refuse_ignored.sh COMPILER ARGUMENTS...: compile, and fail if ptxas ignored a directive of the source.
#
# ptxas drops `setmaxnreg` if it cannot determine the number of registers at entry, e.g. without a number of blocks per
# SM in `__launch_bounds__`. It prints an info line and succeeds. The kernel then runs with far fewer registers.
output=$(mktemp) || exit
trap 'rm -f "$output"' EXIT
trap 'exit 143' HUP INT TERM
"$@" >"$output" 2>&1
status=$?
cat "$output" >&2
if [ "$status" = 0 ] && grep -i '^ptxas.*ignored' "$output" >/dev/null; then
  echo "$0: ptxas ignored part of the source, see above: this is an error here" >&2
  # Make would treat an existing object file as up to date.
  while [ "$#" -gt 0 ]; do
    if [ "$1" = -o ]; then rm -f "$2"; fi
    shift
  done
  exit 1
fi
exit "$status"
