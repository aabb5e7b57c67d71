{ s += $1 }
END { print s / (NR - 1) }
