whence compdef >/dev/null || { autoload -U compinit && compinit; }
autoload -U +X bashcompinit && bashcompinit
_subagent_fleet() {
  local IFS=$'\n'
  COMPREPLY=($("$1" completion -- "${COMP_WORDS[@]:1:$COMP_CWORD}" 2>/dev/null))
}
complete -o default -F _subagent_fleet subagent-fleet flt
