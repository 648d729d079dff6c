from drafter_service.service import main

main()
