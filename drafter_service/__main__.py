from drafter_service.app import main

main()
