class SubagentFleet < Formula
  desc "Run Claude Code-style subagents across your local model fleet"
  homepage "https://github.com/adityak74/subagent-fleet"
  url "@URL@"
  version "@VERSION@"
  sha256 "@SHA256@"
  license "MIT"

  uses_from_macos "python"

  def install
    bin.install "subagent_fleet.py" => "subagent-fleet"
    generate_completions_from_executable(bin/"subagent-fleet", "completion")
  end

  test do
    assert_match version.to_s, shell_output("#{bin}/subagent-fleet --version")
    system bin/"subagent-fleet", "demo"
  end
end
