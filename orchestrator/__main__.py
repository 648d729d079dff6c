from orchestrator.service import main

main()
