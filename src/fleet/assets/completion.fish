complete -c subagent-fleet -c flt \
  -a '(subagent-fleet completion -- (commandline -opc)[2..-1] "" 2>/dev/null)'
