_subagent_fleet() {
  local lines
  lines=$("$1" completion -- "${COMP_WORDS[@]:1:$COMP_CWORD}" 2>/dev/null)
  local IFS=$'\n'  # only now: bash before 4.3 joins the words above where it has no space
  COMPREPLY=($lines)
}
complete -o default -F _subagent_fleet subagent-fleet flt
